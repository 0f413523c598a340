"""What every package may use: errors, coercion of options, module surgery, DTensor helpers."""
