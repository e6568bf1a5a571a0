"""Distance of a step from the roofline of its hardware: launches, bytes, waits of the real worker, without a GPU"""
