"""An OpenAI-compatible server: continuous batching over one cache, depth per request, a playground."""
