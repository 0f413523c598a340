"""What the same bits on every layout need of the ranks: sums in one order, and where a forward is."""
