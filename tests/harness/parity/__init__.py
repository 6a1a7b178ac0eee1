"""What the tests of torch's documented behaviour share; everything here runs on either implementation."""
