"""The HTTP service: OpenAI's protocol and the articles' `/generate` on top of the async engine."""
