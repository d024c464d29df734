"""Layer 3: each operator as a PyTorch user meets it, one module an operator.

With ``kernel=None`` each is one node of what ``torch.compile`` traces (see ``compiled.py``).
"""
