"""How gradients are reduced: by which factor, in which dtype, and those that a backward left unfinished."""
