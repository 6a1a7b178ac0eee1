"""What the tests of several behaviours share: models to shard, how they are trained, and what is compared of them."""
