"""The engine in a thread or a process of its own, for an event loop that must never wait."""
