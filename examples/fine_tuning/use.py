"""Compare a picture with two captions, using the exported model in open_clip."""

import open_clip
import torch
from PIL import Image

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:exported")
tokenizer = open_clip.get_tokenizer("local-dir:exported")
model.eval()
with torch.no_grad():
    image = model.encode_image(preprocess(Image.open("photo.jpg")).unsqueeze(0), normalize=True)
    texts = model.encode_text(tokenizer(["a photo of a cat", "a photo of a dog"]), normalize=True)
print("similarities", (image @ texts.T).tolist())
