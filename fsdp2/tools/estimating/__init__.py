"""What a training run needs before it runs: memory and traffic of one rank, simulated on a laptop.

The engine itself runs, on tensors without memory (`subject`, `simulation`); a dispatch mode writes down what is
allocated and freed (`memory`, `observing`), and transports what is exchanged (`traffic`). `estimate` puts it together,
`result` holds it, `suggest` tries settings with it.
"""
