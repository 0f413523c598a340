"""Other systems' spellings: Colossal-AI, Apex, Composer."""
