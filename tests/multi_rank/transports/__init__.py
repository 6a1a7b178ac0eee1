"""How ranks exchange: sends between peers, process groups written in Python, and what tools count of it."""
