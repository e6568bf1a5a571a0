"""The ranks of one engine core: brought up, driven in step, watched, ended; and going on without some of them."""
