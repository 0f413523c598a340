"""``paramp report``: the page of a run."""
