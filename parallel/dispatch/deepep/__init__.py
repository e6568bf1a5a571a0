"""DeepEP's two generations, one adapter file each, and the start of the library."""
