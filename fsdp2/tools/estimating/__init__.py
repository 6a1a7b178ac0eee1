"""What one rank of a training run needs, before it runs: memory and traffic, simulated on a laptop.

The engine itself runs, on tensors without memory (`subject`, `simulation`). A dispatch mode records what is allocated
and freed (`memory`, `observing`), and transports record what is exchanged (`traffic`). `estimate` puts this together,
`result` holds it, and `suggest` tries settings with it.
"""
