"""What `launch/train.py` is made of: its settings, its data, its log."""
