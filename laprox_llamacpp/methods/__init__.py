"""One method, one file: what it scores by, and its defaults. docs/methods.md compares them."""
