"""The ResNet-34 script of Colossal-AI's document on AMP, with its imports from ``paramp.compat``.

python examples/colossalai_resnet34.py                                          AMP_TYPE.TORCH
python examples/colossalai_resnet34.py naive                                    AMP_TYPE.NAIVE; or apex
torchrun --standalone --nproc-per-node 2 examples/colossalai_resnet34.py        data parallelism

Set DATA=FOLDER in the environment to train on CIFAR-10's binary version in that folder: 200 epochs in batches of 128,
as in the document. Without it: four epochs on 96 digits of scikit-learn at a lower rate (pip install
"paramp[examples]").
"""

import argparse
import os

import torch
from images import load_images
from torch.nn.functional import pad

from paramp.compat import colossalai
from paramp.compat.colossalai.amp import AMP_TYPE
from paramp.compat.colossalai.core import global_context as gpc
from paramp.compat.colossalai.logging import get_dist_logger
from paramp.compat.colossalai.nn.lr_scheduler import CosineAnnealingLR
from paramp.compat.colossalai.utils import get_current_device, get_dataloader
from paramp.models import resnet34

DATA = os.environ.get("DATA") or None

FP16 = {
    "torch": dict(
        mode=AMP_TYPE.TORCH,
        # below are default values for grad scaler
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
    ),
    "apex": dict(mode=AMP_TYPE.APEX, opt_level="O1"),
    # by default the scale begins at 2**32, which overflows for the first dozen steps
    "naive": dict(mode=AMP_TYPE.NAIVE, initial_scale=2**16),
}


def augment(image: torch.Tensor) -> torch.Tensor:
    """A random crop, as torchvision's ``RandomCrop(size=32, padding=4)``."""
    top, left = torch.randint(9, (2,)).tolist()
    return pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]


def at_least_1(text: str) -> int:
    """An integer of 1 or more, as argparse's ``type``."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected 1 or more")
    return value


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("amp", choices=FP16, nargs="?", default="torch")
parser.add_argument("--epochs", type=at_least_1, default=200 if DATA else 4)
parser.add_argument("--batch-size", type=at_least_1, default=128 if DATA else 32, help="of a data rank")
parser.add_argument("--images", type=at_least_1, default=None if DATA else 96, help="the first of them only")
options = parser.parse_args()

train_dataset = load_images(DATA, side=32, channels=3, transform=augment)[0]
num_images = options.images or len(train_dataset)
if num_images > len(train_dataset):
    parser.error(f"--images: got {num_images}, expected at most the {len(train_dataset)} that there are to train on")

CONFIG = dict(BATCH_SIZE=options.batch_size, NUM_EPOCHS=options.epochs, fp16=FP16[options.amp])

# launch distributed setting
colossalai.launch_from_torch(config=CONFIG)
logger = get_dist_logger()

# build your model, optimizer, criterion, dataloaders
model = resnet34(num_classes=10)
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if DATA else 0.01, momentum=0.9, weight_decay=5e-4)
lr_scheduler = CosineAnnealingLR(optimizer, total_steps=gpc.config.NUM_EPOCHS)
train_dataloader = get_dataloader(
    dataset=torch.utils.data.Subset(train_dataset, range(num_images)),
    shuffle=True,
    batch_size=gpc.config.BATCH_SIZE,
    num_workers=1,
    pin_memory=True,
)

# by reading global variable gpc.config,
# colossalai.initialize function convert the model, optimizer and criterion
# to mixed precision
engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

for epoch in range(gpc.config.NUM_EPOCHS):
    # execute a training iteration
    engine.train()
    for img, label in train_dataloader:
        img = img.to(get_current_device())
        label = label.to(get_current_device())

        # set gradients to zero
        engine.zero_grad()

        # run forward pass
        output = engine(img)

        # compute loss value and run backward pass
        train_loss = engine.criterion(output, label)
        engine.backward(train_loss)

        # update parameters
        engine.step()

    # update learning rate
    lr_scheduler.step()

    logger.info(f"Epoch {epoch} - train loss: {train_loss:.5}, lr: {lr_scheduler.get_last_lr()[0]:.5g}", ranks=[0])
