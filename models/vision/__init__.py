"""Vision towers: from the patches of an image to the embeddings of its tokens."""
