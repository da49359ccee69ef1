"""CAMBench-QR: mass of maps on the parts of a code and on the rest of the image."""
