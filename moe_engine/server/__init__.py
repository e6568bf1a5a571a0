"""HTTP server: OpenAI-compatible and SGLang-native endpoints."""
