// An agent in Node: run `npm install openai` in this folder. It reads OPENAI_BASE_URL and
// OPENAI_API_KEY, so it calls the server that they name.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const messages = [{ role: "user", content: process.argv[2] }];
const draft = await client.chat.completions.create({ model: "policy", messages });
messages.push(draft.choices[0].message, { role: "user", content: process.argv[2] });
const answer = await client.chat.completions.create({ model: "policy", messages });
console.log(answer.choices[0].message.content);
