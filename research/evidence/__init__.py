"""How often the verdict is wrong about what a network uses, measured on networks with known shortcuts."""
