"""Many engines on the machines of a Ray cluster, their number following the load."""
