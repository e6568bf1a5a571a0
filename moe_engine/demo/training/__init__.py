"""Training of the embedded model. No module here is imported for serving."""
