"""/v1/responses: OpenAI's newer form of chat, over the chat endpoint."""
