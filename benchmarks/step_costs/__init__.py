"""How far a step is from the roofline of its hardware: launches, bytes, waits of the real worker, without a GPU"""
