"""Pipeline parallelism: the stages of a rank, the schedules that run them, and what is sent between them."""
