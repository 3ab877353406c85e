"""What methods are made of: pooling, normalising, allocation. Each is an option object with a spec of one word."""
