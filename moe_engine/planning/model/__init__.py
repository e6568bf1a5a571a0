"""What the model decides or excludes: dtypes, quantization, adapters, kinds of layers."""
