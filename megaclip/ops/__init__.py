"""Operations on tiles of the similarity matrix: one device, without process groups and without autograd."""
