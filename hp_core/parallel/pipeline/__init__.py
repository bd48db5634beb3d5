"""Pipeline parallelism: each rank holds some layers, and hidden states travel from stage to stage."""
