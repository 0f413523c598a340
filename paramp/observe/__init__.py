"""Diagnosis: overflow traces, gradient histograms, replica checks, timelines."""
