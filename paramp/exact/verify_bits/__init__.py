"""``paramp verify --exact``: the bits of two runs, of everything that they compute."""
