"""OpenAI's endpoints for chat and completions: types, answers, and their parts that other chat formats use too."""
