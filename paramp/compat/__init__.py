"""The interfaces of other libraries, one folder each: Colossal-AI, NVIDIA Apex, Composer."""
