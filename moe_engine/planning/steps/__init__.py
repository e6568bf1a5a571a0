"""The steps of one rank: kernel rows, limits, captured and compiled steps."""
