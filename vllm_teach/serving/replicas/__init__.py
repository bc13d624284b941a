"""Several servers behind nginx: its configuration, and who starts, watches and ends them."""
