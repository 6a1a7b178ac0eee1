"""What is gathered and freed between forward and backward: fewer ranks, groups that stay unsharded."""
