"""Training of the embedded model. No file here is imported while serving."""
