"""What Prometheus reads: vLLM's names, and the figures that the articles ask for."""
