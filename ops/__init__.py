"""Layer 3: each operator as a PyTorch user meets it, one module an operator."""
