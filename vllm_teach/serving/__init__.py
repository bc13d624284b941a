"""A service around the engine: HTTP, metrics, several replicas, several devices."""
