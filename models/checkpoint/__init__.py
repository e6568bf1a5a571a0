"""Files of a checkpoint: headers, reads in parts, cuts of matrices."""
