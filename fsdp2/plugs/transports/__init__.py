"""How ranks exchange, where it is not by one collective of torch.distributed."""
