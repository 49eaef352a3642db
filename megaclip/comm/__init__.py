"""Process groups, the neighbour ring and collectives over deepspeed.comm; knows no loss."""
