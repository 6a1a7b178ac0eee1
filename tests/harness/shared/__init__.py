"""What the tests of one behaviour share: models to shard, how they are trained, and what is compared of them."""
