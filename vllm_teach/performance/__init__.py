"""performance."""
