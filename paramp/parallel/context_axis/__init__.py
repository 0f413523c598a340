"""The context axis: each rank has a part of every sequence, and attention sees all of them."""
