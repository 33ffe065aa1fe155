"""Train functions of the shipped examples; configs name them, nothing imports them."""
