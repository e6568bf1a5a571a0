"""Index scores and top-k selection of DeepSeek sparse attention."""
