"""What a training run needs before it runs: memory, traffic and time of one rank, simulated on a laptop.

The engine itself runs, on tensors without memory (`subject`, `simulation`); a dispatch mode writes down what is
allocated and freed (`memory`) and what is computed (`costs`), and `links` says what messages cost. `estimate` puts it
together, `result` holds it, `suggest` searches with it.
"""
