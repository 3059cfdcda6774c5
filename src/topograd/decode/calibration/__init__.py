"""Calibration of a run: measurements, the policy that follows from them, and the file that keeps both."""
