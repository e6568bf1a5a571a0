"""DeepEP's three generations, one adapter file each; `generation.generation_of` distinguishes them."""
